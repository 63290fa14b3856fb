"""The indexer of DeepSeek sparse attention: scores over pages, and the selection of the tokens that a query sees."""
