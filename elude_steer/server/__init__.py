"""An OpenAI-compatible server whose requests may each carry an edit, and a client for other engines."""
