"""Table 4: grade-school problems with more operations than were trained on."""
