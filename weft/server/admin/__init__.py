"""Administration: routes that change or query the running engine."""
