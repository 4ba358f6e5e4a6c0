"""Where jobs run: one interface, one job folder, one runner for every back end."""
