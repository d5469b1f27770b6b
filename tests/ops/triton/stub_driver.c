/* A stub of libcuda.so.1, as far as Triton calls it: every call succeeds at once, and launches are recorded. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { MAX_PARAMETERS = 64 };

typedef struct { /* the first fields of CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
} Config;

EXPORT uint64_t stub_launches, stub_function, stub_parameters[MAX_PARAMETERS];
EXPORT unsigned stub_grid[3], stub_count; /* stub_count: how many parameters a launch records */
static uintptr_t handles;

EXPORT int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    (void)extra;
    stub_launches++;
    if (stub_count) {
        stub_function = (uintptr_t)function;
        memcpy(stub_grid, config->grid, sizeof stub_grid);
        for (unsigned i = 0; i < stub_count && i < MAX_PARAMETERS; i++) { /* may be more than there are */
            struct iovec to = {&stub_parameters[i], sizeof *stub_parameters}, from = {parameters[i], sizeof *stub_parameters};
            process_vm_readv(getpid(), &to, 1, &from, 1, 0);
        }
    }
    return 0;
}

static int new_handle(void **handle) {
    *handle = (void *)++handles;
    return 0;
}

static int set(int *value, int to) {
    *value = to;
    return 0;
}

EXPORT int cuModuleLoadData(void **module, const void *image) { (void)image; return new_handle(module); }
EXPORT int cuModuleGetFunction(void **f, void *module, const char *name) { (void)module, (void)name; return new_handle(f); }
EXPORT int cuModuleUnload(void *module) { (void)module; return 0; }
EXPORT int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
EXPORT int cuCtxSetCurrent(void *context) { (void)context; return 0; }
EXPORT int cuCtxGetDevice(int *device) { return set(device, 0); }
EXPORT int cuCtxGetLimit(size_t *value, int limit) { (void)limit; *value = 1024; return 0; }
EXPORT int cuCtxSetLimit(int limit, size_t value) { (void)limit, (void)value; return 0; }
EXPORT int cuDeviceGet(int *device, int ordinal) { return set(device, ordinal); }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)1; return 0; }
EXPORT int cuDriverGetVersion(int *version) { return set(version, 13000); }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)attribute, (void)device; /* among others the shared memory of a block, in bytes */
    return set(value, 1 << 16);
}
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *f) {
    (void)f;
    return set(value, attribute == 0 ? 1024 : 0); /* 0: CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK */
}
EXPORT int cuFuncSetAttribute(void *f, int attribute, int value) { (void)f, (void)attribute, (void)value; return 0; }
EXPORT int cuFuncSetCacheConfig(void *f, int config) { (void)f, (void)config; return 0; }
EXPORT int cuGetErrorString(int error, const char **text) { (void)error; *text = "an error of the stub"; return 0; }
EXPORT int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    (void)attribute;
    memcpy(value, &pointer, sizeof pointer);
    return 0;
}
EXPORT int cuPointerGetAttributes(unsigned n, int *attributes, void **values, uint64_t pointer) {
    (void)n, (void)attributes, (void)values, (void)pointer;
    return 0;
}
EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *f, void *config) { (void)f, (void)config; return set(clusters, 1); }
EXPORT int cuStreamIsCapturing(void *stream, int *status) { (void)stream; return set(status, 0); }
EXPORT int cuTensorMapEncodeTiled(void) { return 1; }
EXPORT int cuTensorMapEncodeIm2col(void) { return 1; }
