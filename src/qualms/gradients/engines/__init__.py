"""The engines: exact, plain autograd, reference and sketch; and which of them serves a request."""
