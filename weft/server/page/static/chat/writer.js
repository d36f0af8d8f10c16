// What is being written: text and attached files, kept for each chat until they are sent.

import { $, isComposing, on } from "../parts.js";
import { chip, read } from "./attach.js";
import { complain } from "./log.js";
import * as store from "./store.js";

const text = $("text");
const DRAFT = "weft-draft-";
const LONG = 2_500; // characters; a longer text that is pasted becomes a file

let send = null; // returns whether the message is on its way
let facts = { takes: [] };
let chat = "";
let files = [];

export const use = (act) => { send = act; };

export function introduce({ has_chat: hasChat = true, takes = [], model, context = 0 }) {
	facts = { takes, model, context };
	text.disabled = $("send").disabled = !hasChat;
	text.placeholder = hasChat ? "Ask " + model : "This model has no chat";
}

// Shows what was begun in a chat.
export async function show(id) {
	chat = id;
	text.value = localStorage.getItem(DRAFT + id) || "";
	files = [];
	draw();
	const kept = await store.draft(id);
	if (chat === id && kept) {
		files = kept.files;
		draw();
	}
}

function keep() {
	if (text.value) localStorage.setItem(DRAFT + chat, text.value);
	else localStorage.removeItem(DRAFT + chat);
}

// Files are too large for the storage of texts.
function keepFiles() {
	if (files.length) store.saveDraft({ id: chat, files });
	else store.removeDraft(chat);
}

const draw = () => $("shots").replaceChildren(...files.map((file) => chip(file, () => {
	files = files.filter((one) => one !== file);
	keepFiles();
	draw();
	text.focus();
})));

export async function take(given) {
	for (const file of given) {
		try {
			const { note, ...made } = await read(file, facts);
			files.push(made);
			if (note) complain(note);
		} catch (error) {
			complain(error.message);
		}
	}
	keepFiles();
	draw();
}

function submit() {
	const said = text.value.trim();
	if ((!said && !files.length) || !send(said, files)) return;
	text.value = "";
	files = [];
	keep();
	keepFiles();
	draw();
}

on("ask", "submit", (event) => {
	event.preventDefault();
	submit();
});
on("text", "input", keep);
on("text", "keydown", (event) => {
	if (event.key !== "Enter" || event.shiftKey || isComposing(event)) return;
	event.preventDefault();
	submit();
});
on("text", "paste", (event) => {
	const { clipboardData: given } = event;
	const pasted = [...given.files];
	const words = given.getData("text");
	if (!pasted.length && words.length > LONG) pasted.push(new File([words], "pasted.txt"));
	if (pasted.length) event.preventDefault();
	take(pasted);
});
for (const id of ["log", "ask"]) {
	on(id, "dragover", (event) => event.preventDefault());
	on(id, "drop", (event) => {
		event.preventDefault();
		take([...event.dataTransfer.files]);
	});
}
on("files", "change", async () => {
	await take([...$("files").files]);
	$("files").value = "";
});

