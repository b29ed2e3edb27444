"""The report of the gate: failures as text, heat maps, tables, plots and summaries."""
