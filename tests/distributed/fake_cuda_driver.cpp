// Stands in for an initialized libcuda.so.1, under whose name it is built.
extern "C" int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
