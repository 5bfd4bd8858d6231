/* A CUDA driver without a GPU, for tests of launchers: it accepts all that it is asked for, and writes each launch as a
   line of JSON to the standard error, with the first array's address, sizes and strides. With STUB_WITHOUT_CONTEXT no
   context is current until one is set, as in a thread that has done nothing on the GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int id; char pad[4]; uint32_t value[16]; } Attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    uint32_t count;
} Config;

enum { MULTIPROCESSORS = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, PLENTY = 1 << 18, MOST_SHARED = 8,
       NO_CONTEXT = 201 };

static int accept(void) { return 0; }
static int one_device(int *count) { *count = 1; return 0; }
static void *const CONTEXT = (void *)0x1000;
static void *set;
static void *current(void) { return set || getenv("STUB_WITHOUT_CONTEXT") ? set : CONTEXT; }
int cuCtxGetCurrent(void **found) { *found = current(); return 0; }
int cuCtxSetCurrent(void *to) { set = to; return 0; }
int cuDevicePrimaryCtxRetain(void **found, int device) { *found = CONTEXT; return 0; }
static int context_of_stream(void *stream, void **found) { *found = current(); return *found ? 0 : NO_CONTEXT; }
static int context_of_pointer(void *found, int attribute, uint64_t pointer) { *(void **)found = CONTEXT; return 0; }
static int context_id(void *of, unsigned long long *id) { *id = 1; return 0; }
int cuCtxGetDevice(int *found) { *found = 0; return current() ? 0 : NO_CONTEXT; }
int cuDeviceGet(int *found, int number) { *found = number; return 0; }
static int version(int *found) { *found = 13000; return 0; }
static int text(int error, const char **said) { *said = "an error of the stub"; return 0; }
static int attribute(int *value, int which, int of) {
    *value = which == CAPABILITY_MAJOR ? 9 : which == CAPABILITY_MINOR ? 0 : which == MULTIPROCESSORS ? 132 : PLENTY;
    return 0;
}
/* A cubin is its own library, and a library's kernel is its bytes: a launch says which cubin it runs. */
int cuLibraryLoadData(const void **library, const void *code, void *a, void *b, int c, void *d, void *e, int f) {
    *library = strdup(code);
    return 0;
}
int cuLibraryGetKernel(const void **found, const void *library, const char *name) { *found = library; return 0; }

/* How much dynamic shared memory a launch may ask for, of the kernel that was last said to need any. */
static int allowed;
static int no_attribute(int *value, int which, const void *of, int device) { *value = 0; return 0; }
int cuKernelSetAttribute(int which, int value, const void *of, int device) {
    if (which == MOST_SHARED) allowed = value;
    return 0;
}

int cuLaunchKernelEx(const Config *config, const char *function, void **parameters, void **extra) {
    if (!current()) return NO_CONTEXT;
    fprintf(stderr, "{\"cubin\": \"%s\", \"grid\": %u, \"block\": [%u, %u, %u], \"shared\": %u, \"allowed\": %d, ",
            function, config->grid[0], config->block[0], config->block[1], config->block[2], config->shared, allowed);
    fprintf(stderr, "\"attributes\": {");
    for (uint32_t n = 0; n < config->count; n++)
        fprintf(stderr, "%s\"%d\": %u", n ? ", " : "", config->attributes[n].id, config->attributes[n].value[0]);
    fprintf(stderr, "}, \"address\": %llu, \"numbers\": [", *(unsigned long long *)parameters[0]);
    for (int n = 1; n < 5; n++)
        fprintf(stderr, "%s%d", n > 1 ? ", " : "", *(int *)parameters[n]);
    fprintf(stderr, "]}\n");
    return 0;
}

static const struct { const char *name; void *function; } FUNCTIONS[] = {
    {"cuDeviceGetCount", one_device}, {"cuStreamGetCtx", context_of_stream}, {"cuCtxGetCurrent", cuCtxGetCurrent},
    {"cuCtxSetCurrent", cuCtxSetCurrent}, {"cuCtxGetId", context_id}, {"cuCtxGetDevice", cuCtxGetDevice},
    {"cuDeviceGet", cuDeviceGet},
    {"cuDeviceGetAttribute", attribute}, {"cuPointerGetAttribute", context_of_pointer},
    {"cuLibraryLoadData", cuLibraryLoadData}, {"cuLibraryGetKernel", cuLibraryGetKernel},
    {"cuDriverGetVersion", version}, {"cuGetErrorString", text}, {"cuGetErrorName", text},
    {"cuLaunchKernelEx", cuLaunchKernelEx}, {"cuKernelSetAttribute", cuKernelSetAttribute},
    {"cuKernelGetAttribute", no_attribute},
};

int cuGetProcAddress_v2(const char *name, void **found, int asked, uint64_t flags, int *status) {
    if (status) *status = 0;
    *found = accept;
    for (size_t n = 0; n < sizeof FUNCTIONS / sizeof *FUNCTIONS; n++)
        if (!strcmp(name, FUNCTIONS[n].name)) *found = FUNCTIONS[n].function;
    return 0;
}

int cuInit(unsigned flags) { return 0; }
