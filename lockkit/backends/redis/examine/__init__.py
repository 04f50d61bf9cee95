"""What ``lockkit doctor`` examines on Redis and Valkey servers."""
