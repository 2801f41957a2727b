"""What several test files share; tests import helpers from here, never from each other."""
