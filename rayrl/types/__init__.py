"""What crosses processes: frozen records and the protocols that users implement."""
