"""What ``lockkit doctor`` looks at on Redis and Valkey servers."""
