"""The report of the gate: stories, heat maps, tables, plots and summaries."""
