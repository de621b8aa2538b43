/* The least that an all-reduce of two ranks over MPI can do: exchange halves, add, exchange sums.
   What benchmarks/between_hosts.py measures beside the library; built with the MPI's own mpicc. */
#include <mpi.h>
#include <stddef.h>

/* x: count floats, reduced in place; scratch: room for half of them. */
int sendrecv_add(float* restrict x, float* restrict scratch, size_t count) {
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int other = 1 - rank;
  const size_t half = count / 2;
  const size_t begins[2] = {0, half};
  const size_t lengths[2] = {half, count - half};
  float* const mine = x + begins[rank];
  float* const theirs = x + begins[other];
  int failed = MPI_Sendrecv(theirs, (int)lengths[other], MPI_FLOAT, other, 1, scratch,
                            (int)lengths[rank], MPI_FLOAT, other, 1, MPI_COMM_WORLD,
                            MPI_STATUS_IGNORE);
  for (size_t i = 0; i < lengths[rank]; ++i) mine[i] += scratch[i];
  failed |= MPI_Sendrecv(mine, (int)lengths[rank], MPI_FLOAT, other, 2, theirs,
                         (int)lengths[other], MPI_FLOAT, other, 2, MPI_COMM_WORLD,
                         MPI_STATUS_IGNORE);
  return failed;
}
