"""Programs that call the policy as an OpenAI-compatible endpoint: their calls as a tree."""
