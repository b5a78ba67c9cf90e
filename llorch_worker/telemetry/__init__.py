"""What operators watch: metrics, traces, logs. Nothing here holds a prompt or a text."""
