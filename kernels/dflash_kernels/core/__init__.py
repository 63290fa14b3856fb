"""Common host code of the ops: dispatch, the target device, validation, tuning tables, layouts."""
