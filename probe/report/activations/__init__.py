"""The pictures, the page and the files of an analysis of activations."""
