"""What ``lockkit doctor`` looks at in SQL databases."""
