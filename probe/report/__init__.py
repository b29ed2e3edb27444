"""What is shown of a run: outcomes in, text and bytes out. Knows neither pytest nor torch, and writes no file but by
`summary.write`."""
