"""People who know who knows a code: an agent asks one after another."""
