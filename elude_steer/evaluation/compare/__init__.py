"""The comparison of all methods: who takes part, what is measured, how it runs, its tables."""
