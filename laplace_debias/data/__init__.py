"""Where data come from: inputs, the reader, pools, chunks."""
