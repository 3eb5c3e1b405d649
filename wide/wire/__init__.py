"""The vocabulary that coordinator and nodes speak, and how it looks as bytes. Sans-IO."""
