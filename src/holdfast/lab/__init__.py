"""Tools to choose, check and measure a store before production does."""
