// The list of chats: search, open, rename, delete, and files to keep or read.

import { $, button, el, isComposing, on } from "../parts.js";
import { twice } from "./message.js";
import { complain } from "./log.js";
import * as store from "./store.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";
import { isPhone } from "../views.js";

const DAYS = [["Today", 0], ["Yesterday", 1], ["Last week", 7], ["Last month", 31], ["Earlier", Infinity]];

let chats = { open() {}, renamed() {}, isBusy: () => false };
let current = "";
let shown = []; // chats in the list
const items = new Map(); // their items by id; what is done with one outlives a drawing

export const use = (made) => { chats = made; };

export function mark(id) {
	current = id;
	for (const item of $("chat-list").querySelectorAll("[data-id]")) item.setAttribute("aria-current", item.dataset.id === id);
}

export async function draw() {
	const words = $("chat-search").value.trim();
	const found = words && await store.search(words);
	const all = await store.chats();
	if (words !== $("chat-search").value.trim()) return;
	shown = found ? all.filter(({ id }) => found.has(id)) : all;
	const made = [];
	let day = "";
	for (const chat of shown) {
		const next = dayOf(chat.at);
		if (next !== day) made.push(el("li", "day", next));
		day = next;
		if (!items.has(chat.id)) items.set(chat.id, new Item());
		items.get(chat.id).update(chat, found ? found.get(chat.id) : "");
		made.push(items.get(chat.id).box);
	}
	const ids = new Set(shown.map(({ id }) => id));
	for (const id of items.keys()) if (!ids.has(id)) items.delete(id);
	if (!made.length) made.push(el("li", "none", words ? "No chat has these words." : "Your chats stay in this browser."));
	arrange(made);
	mark(current);
}

// What has the focus stays where it is: an element that moves loses it, and a word that is composed.
function arrange(all) {
	const list = $("chat-list");
	const at = all.findIndex((one) => one.contains(document.activeElement));
	if (at < 0) return list.replaceChildren(...all);
	for (const one of [...list.children]) if (one !== all[at]) one.remove();
	all[at].before(...all.slice(0, at));
	all[at].after(...all.slice(at + 1));
}

function dayOf(at) {
	const midnight = new Date().setHours(0, 0, 0, 0);
	const ago = Math.ceil((midnight - at) / 86_400_000);
	return DAYS.find(([, days]) => ago <= days)[0];
}

class Item {
	#chat;
	#title = button("", () => open(this.#chat.id), "title");
	#summary = el("summary", "", "⋯");
	#menu = el("details", "menu", this.#summary, el("div", "acts",
		button("Rename", () => this.#rename()),
		button("Markdown", () => this.#save("md", "text/markdown", toMarkdown)),
		button("JSON", () => this.#save("json", "application/json", (...pair) => toJson([pair]))),
		button("Delete", (event) => twice(event.target, () => remove(this.#chat.id))),
	));
	box = el("li", "", this.#title, this.#menu);

	// `place`: where in the chat a search has found its words.
	update(chat, place) {
		this.#chat = chat;
		this.#title.dataset.id = chat.id;
		this.#title.replaceChildren(el("span", "", chat.title || "New chat"), ...[place, chats.isBusy(chat.id) && "answers…"].filter(Boolean).map((words) => el("small", "", words)));
		this.#summary.ariaLabel = "Actions of " + chat.title;
	}

	async #save(ending, type, write) {
		save(`${fileOf(this.#chat)}.${ending}`, type, write(this.#chat, await store.nodes(this.#chat.id)));
	}

	#rename() {
		const { id, title: before } = this.#chat;
		const field = Object.assign(el("input"), { value: before, ariaLabel: "Title of the chat" });
		const end = async (isKept, isLeft = false) => {
			field.onblur = null;
			const title = field.value.trim();
			const now = isKept && title && await store.chat(id);
			if (now) {
				await store.save({ ...now, title });
				chats.renamed(id, title);
			}
			this.#menu.open = false;
			this.box.replaceChildren(this.#title, this.#menu);
			await draw();
			if (!isLeft) this.#title.focus();
		};
		field.onblur = () => end(true, true);
		field.addEventListener("keydown", (event) => {
			event.stopPropagation();
			if (isComposing(event)) return;
			if (event.key === "Enter") end(true);
			if (event.key === "Escape") end(false);
		});
		this.box.replaceChildren(field);
		field.select();
		field.focus();
	}
}

async function open(id) {
	await chats.open(id);
	if (isPhone()) toggle(false);
	$("text").focus({ preventScroll: true });
}

async function remove(id) {
	const at = shown.findIndex((chat) => chat.id === id);
	await store.remove(id);
	localStorage.removeItem("weft-draft-" + id);
	store.removeDraft(id);
	await draw();
	if (id === current) await chats.open(shown[Math.min(at, shown.length - 1)]?.id);
	($("chat-list").querySelector("[data-id]") || $("chat-new")).focus();
}

// The chat before or after.
export function step(by) {
	const at = shown.findIndex((chat) => chat.id === current);
	const next = shown[Math.min(Math.max(at + by, 0), shown.length - 1)];
	if (next) chats.open(next.id);
}

// ---- files

const fileOf = ({ title }) => title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat";

function save(name, type, text) {
	const link = Object.assign(el("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
	link.click();
	setTimeout(() => URL.revokeObjectURL(link.href), 1_000);
}

on("chats-export", "click", async () => {
	const all = await store.chats();
	const pairs = await Promise.all(all.map(async (chat) => [chat, await store.nodes(chat.id)]));
	save("weft-chats.json", "application/json", toJson(pairs));
});

on("chats-import", "change", async () => {
	const [file] = $("chats-import").files;
	$("chats-import").value = "";
	if (!file) return;
	try {
		const pairs = fromJson(await file.text(), store.newId);
		for (const [chat, nodes] of pairs) {
			for (const node of nodes.values()) await store.saveNode(node);
			await store.save(chat);
		}
		await draw();
		if (pairs.length) await open(pairs[0][0].id);
	} catch (error) {
		complain(`${file.name}: ${error.message}`);
	}
});

// ---- on a narrow page the list lies over the chat

function toggle(isOpen) {
	$("main").toggleAttribute("data-chats", isOpen);
	$("chats-show").ariaExpanded = isOpen;
	if (isOpen) $("chat-search").focus();
}

// Returns whether it was open.
export function close() {
	const wasOpen = $("main").hasAttribute("data-chats");
	if (wasOpen) {
		toggle(false);
		$("chats-show").focus();
	}
	return wasOpen;
}

export function search() {
	toggle(true);
	$("chat-search").select();
}

on("chats-show", "click", () => toggle(!$("main").hasAttribute("data-chats")));
on("chat-search", "input", draw);
