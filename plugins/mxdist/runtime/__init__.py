"""The node side: what runs where mxnet is."""
