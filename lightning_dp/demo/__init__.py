"""What the default configuration trains: real data that comes with scikit-learn, and a small net."""
