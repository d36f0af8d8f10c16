// Files for a message: pictures, sounds and videos for models that take them; texts of others.

import { button, el, num } from "../parts.js";

const MOST_MB = 16;
const MEDIA = { image: "pictures", audio: "sounds", video: "videos" };
const TEXTS = /svg|mp2t|-tts/; // drawings, and TypeScript
const SIGNS = { image: "▣", audio: "♪", video: "▶", text: "≡" };
const SIGNS_A_TOKEN = 4; // of English text, about
const PDF_S = 20; // to read a PDF

// A file for a message: { kind, name, data or text }, and a `note` for the user. An Error says
// why it cannot be sent.
export async function read(file, { takes, model, context }) {
	const { name, size } = file;
	if (size > MOST_MB * 1e6) throw new Error(`${name} has ${(size / 1e6).toFixed(1)} MB; at most ${MOST_MB} MB can be sent`);
	const kind = file.type.split("/")[0];
	if (kind in MEDIA && !TEXTS.test(file.type)) {
		if (!takes.includes(kind)) throw new Error(`${name}: ${model} takes no ${MEDIA[kind]}`);
		return { kind, name, data: await urlOf(file) };
	}
	const { text, isDamaged } = await textOf(file);
	const tokens = Math.round(text.length / SIGNS_A_TOKEN);
	const notes = [];
	if (isDamaged) notes.push(`${name} is damaged: only what can be read of it is attached`);
	if (context && tokens > context) notes.push(`${name} has about ${num(tokens)} tokens; the context of ${model} has ${num(context)}`);
	return { kind: "text", name, text, note: notes.join(". ") };
}

async function textOf(file) {
	const bytes = new Uint8Array(await file.arrayBuffer());
	const isPdf = String.fromCharCode(...bytes.subarray(0, 5)) === "%PDF-";
	if (isPdf) {
		const found = await readPdf(bytes);
		if (found.error) throw new Error(`${file.name}: ${found.error}`);
		return found;
	}
	try {
		return { text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) };
	} catch {
		throw new Error(`${file.name} is no text, picture, sound or PDF`);
	}
}

async function readPdf(bytes) {
	const worker = new Worker(new URL("./pdf.js", import.meta.url));
	const found = await new Promise((done) => {
		worker.onmessage = ({ data }) => done(data);
		worker.onerror = () => done({ error: "it cannot be read" });
		setTimeout(done, PDF_S * 1_000, { error: `it takes longer than ${PDF_S} s to read` });
		worker.postMessage(bytes, [bytes.buffer]);
	});
	worker.terminate();
	return found;
}

const urlOf = (file) => new Promise((done, fail) => {
	const reader = new FileReader();
	reader.onload = () => done(reader.result);
	reader.onerror = () => fail(new Error(`${file.name} cannot be read`));
	reader.readAsDataURL(file);
});

// A file on the page; its button calls `drop`.
export function chip({ kind, name, data, text }, drop) {
	const made = el("span", "chip");
	if (kind === "image") made.append(Object.assign(el("img"), { src: data, alt: name }));
	else made.append(`${SIGNS[kind]} ${name}`);
	if (kind === "text") made.append(el("small", "", `${num(text.length)} characters`));
	if (drop) made.append(Object.assign(button("✕", drop), { ariaLabel: "Remove " + name }));
	return made;
}
