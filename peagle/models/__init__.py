"""nn.Modules and nothing else; attention is injected."""
