// Generates with llama.cpp, all prompts in one batch, and prints the tokens a second: the part of
// bench/serve_peers.py that needs Node. The job comes from stdin: {file, prompts, tokens, threads}.
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";
import {join} from "node:path";

const require = createRequire(pathToFileURL(join(process.argv[2], "package.json")));
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const job = JSON.parse(readFileSync(0, "utf8"));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: job.file});
const context = await model.createContext({
    sequences: job.prompts.length,
    contextSize: 512,
    batchSize: 2048,
    threads: job.threads,
});
const texts = job.prompts.map((text) => `<|im_start|>user\n${text}<|im_end|>\n<|im_start|>assistant\n`);
const since = performance.now();
const counts = await Promise.all(texts.map(async (text) => {
    const sequence = context.getSequence();
    let count = 0;
    for await (const token of sequence.evaluate(model.tokenize(text, true), {temperature: 0})) {
        count += 1;
        if (count >= job.tokens)
            break;
    }
    return count;
}));
const total = counts.reduce((a, b) => a + b, 0);
console.log(JSON.stringify({rate: 1000 * total / (performance.now() - since)}));
process.exit(0);
