"""Which rows a batch trains on, who sees whom, and what they are asked to predict."""
