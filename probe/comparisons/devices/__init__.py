"""Two recordings of one model on two devices: what differs, where it began, and whether it is noise or a fault."""
