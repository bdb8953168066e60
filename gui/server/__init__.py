"""What is served and to whom: the application, the sign-in, what may come in, static files, the language."""
