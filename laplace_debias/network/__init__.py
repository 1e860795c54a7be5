"""The network as it is: left as found, its parameters' owners, recorded calls, its loss."""
