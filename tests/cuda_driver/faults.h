// A kernel that touches what is not there faults, and its process with it: first it is said which.
#pragma once

namespace standin {

// Once. The signal goes on to whoever had it before.
void name_faults();
// Of each thread that runs kernels: a fiber's own stack may be what is too small.
void prepare_fault_stack();

}  // namespace standin
