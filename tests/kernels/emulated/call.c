// Calls one function of the kernels on a processor that only an emulator has.
//
//     call LIBRARY FUNCTION ARGUMENT...
//
// An argument is L and a whole number, F and a float, N for NULL, or P and a file, whose bytes the
// function reads and may change. M and a file is memory that other files point to: R and four numbers,
// "file place target offset", writes the address of a byte of the target to a place of a file, whose
// files and places, of eight bytes each, count from 0. Prints what the function returns.
//
// AArch64 and x86-64 pass whole numbers and pointers in one row of registers and then on the stack, and
// floats in a row of their own. So one type calls every function that takes at most two floats.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 18, MOST_FILES = 400 };

typedef long (*Function)(long, long, long, long, long, long, long, long, long, long, long, long,
                         long, long, long, long, long, long, float, float);

typedef struct {
    const char *path;
    void *bytes;
    size_t size;
} File;

static void *must(void *made, const char *what) {
    if (made == NULL) {
        fprintf(stderr, "%s failed\n", what);
        exit(1);
    }
    return made;
}

static File file_at(const char *path) {
    FILE *from = must(fopen(path, "rb"), path);
    fseek(from, 0, SEEK_END);
    File file = {path, NULL, (size_t)ftell(from)};
    rewind(from);
    file.bytes = must(aligned_alloc(64, (file.size + 64) / 64 * 64), "aligned_alloc");
    if (fread(file.bytes, 1, file.size, from) != file.size) must(NULL, path);
    fclose(from);
    return file;
}

static void write_back(File file) {
    FILE *to = must(fopen(file.path, "wb"), file.path);
    if (fwrite(file.bytes, 1, file.size, to) != file.size || fclose(to)) must(NULL, file.path);
}

int main(int count, char **arguments) {
    must(dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL), "libgomp.so.1");
    void *library = must(dlopen(arguments[1], RTLD_NOW), arguments[1]);
    const Function function = (Function)must(dlsym(library, arguments[2]), arguments[2]);
    long a[MOST] = {0};
    File files[MOST_FILES];
    float f[2] = {0};
    int whole = 0, floats = 0, opened = 0;
    for (int i = 3; i < count; i++) {
        const char *value = arguments[i] + 1;
        switch (arguments[i][0]) {
            case 'F': f[floats++] = strtof(value, NULL); break;
            case 'L': a[whole++] = atol(value); break;
            case 'N': whole++; break;
            case 'M': files[opened++] = file_at(value); break;
            case 'R': {
                int file, target;
                long place, offset;
                sscanf(value, "%d %ld %d %ld", &file, &place, &target, &offset);
                ((char **)files[file].bytes)[place] = (char *)files[target].bytes + offset;
                break;
            }
            case 'P':
                files[opened] = file_at(value);
                a[whole++] = (long)files[opened++].bytes;
                break;
        }
    }
    printf("%ld\n", function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                             a[11], a[12], a[13], a[14], a[15], a[16], a[17], f[0], f[1]));
    for (int i = 0; i < opened; i++) write_back(files[i]);
    return 0;
}
