"""Who may leave: rules of retention as values, each with one pure plan."""
