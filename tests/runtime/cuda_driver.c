/* A CUDA driver for tests of what tilekern asks it before anything is launched: how many GPUs there are, what they are
   called, which CUDA it serves. Environment variables say what it answers. */
#include <stdlib.h>
#include <string.h>

static int number(const char *name, int otherwise) {
    const char *said = getenv(name);
    return said ? atoi(said) : otherwise;
}

int cuInit(unsigned flags) { return number("STUB_INIT", 0); }
int cuDriverGetVersion(int *found) { *found = number("STUB_CUDA", 13000); return 0; }
int cuDeviceGetCount(int *found) { *found = number("STUB_GPUS", 1); return 0; }
int cuDeviceGet(int *found, int which) { *found = which; return 0; }
int cuGetErrorName(int error, const char **found) { *found = "CUDA_ERROR_OF_A_STUB"; return 0; }

int cuDeviceGetName(char *found, int size, int device) {
    const char *said = getenv("STUB_NAME");
    strncpy(found, said ? said : "NVIDIA H200", size);
    return 0;
}

int cuDeviceGetAttribute(int *found, int which, int device) {
    switch (which) {
    case 16: *found = number("STUB_SMS", 132); return 0;
    case 36: *found = 3201000; return 0;
    case 37: *found = 6144; return 0;
    case 38: *found = 1 << 25; return 0;
    case 39: *found = 2048; return 0;
    case 75: *found = number("STUB_MAJOR", 9); return 0;
    case 76: *found = 0; return 0;
    case 81: *found = 200 << 10; return 0;
    }
    return 1;
}
