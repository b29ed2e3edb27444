"""What is shown: results in, text, pictures and pages out. Knows no pytest; writes by `files.write` only."""
