"""What the SQL backends share: connections, dialects, errors, statements."""
