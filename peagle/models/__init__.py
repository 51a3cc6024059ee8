"""The target decoder and the drafter as nn.Modules; attention is passed in by the caller."""
