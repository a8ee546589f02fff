"""A real federation between hospitals: kits, the jobs that run at server and sites, and their driver."""
