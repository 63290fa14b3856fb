"""The gated delta rule: verification with factors, their fold into the state, plain steps and prompts in pieces."""
