// The header in C++.
#include "strakegds.h"

int main() {
  strakegds_options options{};
  strakegds *bridge = nullptr;
  return strakegds_open(&options, &bridge);
}
