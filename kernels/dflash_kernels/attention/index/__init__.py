"""Which tokens a query sees by the scores of an indexer (DeepSeek sparse attention): scores over pages, and the choice."""
