"""Rules taken out of the code one by one, and the tests that must notice: `mutants.table`."""
