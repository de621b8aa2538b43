// Errors that tests plant in the driver's functions, as they are called through cuGetProcAddress:
// who calls the exported names, as tests do for themselves, is neither counted nor failed.
#pragma once

#include <cstddef>

#include "exports.h"

#pragma GCC visibility push(default)
extern "C" {
// Has the n-th call from now on of a function, by its base name, give `code`, and do nothing; with
// CUDA_ERROR_NOT_READY all later ones, too; n = 0: none any more. Of a code that ends contexts
// (CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED) all of the process's have it from then on.
// Returns 0, or -1 where there is no such function.
int standinFail(const char* name, int n, int code);
// Calls that begin while it is locked wait until it is not, as where another thread of the process
// holds the driver's lock. 1: it is locked from now on; 0: no more.
void standinLock(int locked);
// Calls of the function so far; -1 alike.
long standinCalls(const char* name);
}
#pragma GCC visibility pop

namespace standin {

#define STANDIN_ROW_NUMBER(base, since, exported) kRow_##base,
enum Row : std::size_t {
  STANDIN_FUNCTIONS(STANDIN_ROW_NUMBER) STANDIN_OLDER_FUNCTIONS(STANDIN_ROW_NUMBER) kRows
};
#undef STANDIN_ROW_NUMBER

// Counts a call of the function in this row of the table, and says what it is to give.
CUresult planted(Row row);

template <auto function, Row row>
struct Called;
template <class... Parameters, CUresult (*function)(Parameters...), Row row>
struct Called<function, row> {
  static CUresult call(Parameters... parameters) {
    const CUresult error = planted(row);
    return error == CUDA_SUCCESS ? function(parameters...) : error;
  }
};

}  // namespace standin
