// Graphs: what was captured, to be launched as often as one likes.
#pragma once

#include "capture.h"

namespace standin {

CUgraph add_graph(Graph graph);

}  // namespace standin
