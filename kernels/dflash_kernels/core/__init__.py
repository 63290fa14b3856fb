"""What every op shares: dispatch, the target device, validation, tuning tables, layouts."""
