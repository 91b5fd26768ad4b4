"""What a run can be continued from, and the record of what became of each prompt."""
