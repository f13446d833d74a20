"""What people see: progress while a job runs, pictures afterwards."""
