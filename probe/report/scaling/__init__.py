"""What a scaling sweep found, for people: the analysis blocks, tables, plots and a page. Only this part draws."""
