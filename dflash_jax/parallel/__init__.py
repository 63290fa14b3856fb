"""Several GPUs of one host: what each of them holds of a model, and what they tell one another."""
